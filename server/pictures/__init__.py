"""Pictures in prompts: where they come from, and what a model's own processor makes of them."""
