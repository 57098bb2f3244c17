"""What only a notebook needs: predictions and checks, figures, a figure that follows a run."""
