"""What a person sees: everything that knows Gradio. Models are the business of `core`."""
