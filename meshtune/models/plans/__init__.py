"""Plans: how tensor parallelism may cut a model, found in transformers' tables and in the model's own structure."""
