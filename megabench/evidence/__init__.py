"""Evidence about one case: its tensors when it fails, a script that repeats it, a profile."""
