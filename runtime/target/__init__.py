"""The target model: its forward over trees, its attention and its KV cache."""
