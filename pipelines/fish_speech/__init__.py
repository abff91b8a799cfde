"""Fish Speech S2: cloned voices, described deliveries and long dialogues, a dual AR on vLLM and a causal
44.1 kHz codec."""
