"""What an operator wants to know of a running app. `health` says whether it is healthy, and why not."""
