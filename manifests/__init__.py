"""What a model, a topology and an artifact are: pure data and arithmetic, standard library only."""
