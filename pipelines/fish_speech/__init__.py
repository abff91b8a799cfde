"""Fish Speech S2: cloned voices, described deliveries and long dialogues. A dual AR makes codes, which a
causal 44.1 kHz codec decodes."""
