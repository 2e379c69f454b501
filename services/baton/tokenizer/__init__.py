"""The tokenizer process: text and chats become token ids."""
