"""The target model's forward: loading, KV cache, tree attention, and its fast paths on CPUs and GPUs."""
