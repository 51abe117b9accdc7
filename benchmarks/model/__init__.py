"""The paper model; docs/model.md explains it."""
