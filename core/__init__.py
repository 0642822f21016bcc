"""The engine: speculative decoding that can be seen. Knows models; knows nothing of the page (no gradio, no plotly)."""
