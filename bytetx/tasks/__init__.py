"""What the engines compute from hidden states, one file a task; see encode.step.Task."""
