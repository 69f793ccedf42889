"""The embedded engine: serves any causal LM of transformers over SGLang's native HTTP calls."""
