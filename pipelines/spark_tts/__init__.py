"""SparkTTS: cloned voices and voices created from labels, a speech LM on vLLM between the two halves of
BiCodec."""
