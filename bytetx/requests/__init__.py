"""From what a caller gives to token ids: texts, pairs, prompts and chats."""
