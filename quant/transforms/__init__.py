"""Changes to a model that leave its function as it is and make it easier to round: one file each."""
