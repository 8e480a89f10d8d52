"""What a setting costs: measured on a model and texts of one's own."""
