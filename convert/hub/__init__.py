"""The Hugging Face Hub: the only folder that knows `huggingface_hub`."""
