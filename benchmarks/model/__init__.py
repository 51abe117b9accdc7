"""The paper model: predicts kernel times on GPUs; docs/model.md explains it."""
