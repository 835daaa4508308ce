"""What is made of the hidden states, one room a task; each meets engine.step.Task."""
