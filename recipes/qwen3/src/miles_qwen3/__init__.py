"""The Qwen3 recipe: model, tokenizer, tasks and hardware targets, and the command miles-qwen3."""
