"""The reference engine: paging, prefix matching and offload without the model's arithmetic."""
