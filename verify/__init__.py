"""The target model over its KV cache, tree attention, sampling, acceptance rules and the decode loop."""
