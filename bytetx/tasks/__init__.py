"""Work of the engines on hidden states, one file per task; see tasks/task.py."""
