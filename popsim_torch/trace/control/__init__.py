"""Records loops and branches: functions run once, and nodes call the recorded graphs."""
