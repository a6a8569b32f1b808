"""The recipe of the embedded models: their corpus, their tokenizer, and the training of the pair and its EAGLE head."""
