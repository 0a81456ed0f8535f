"""Processes that train one model together: how they meet, and how they exchange gradients."""
