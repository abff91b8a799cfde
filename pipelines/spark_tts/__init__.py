"""SparkTTS: cloned voices and voices created from labels. A speech LM writes tokens, which BiCodec
decodes."""
