"""Agents: loops that own when a model is called. Each is a file; none knows a provider or a store."""
