"""Records loops and branches: functions run once, and become nodes that call what they did."""
