"""From logits to tokens: penalties, choice and log probabilities of all rows together."""
