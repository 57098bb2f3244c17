"""What is kept of a run, a lesson's run too."""
