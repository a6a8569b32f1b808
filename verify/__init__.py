"""What decides: the target model over our own KV cache, tree attention, sampling, acceptance and the decode loop."""
