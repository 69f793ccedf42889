"""One module per way of writing conversations; data and a few lines each."""
