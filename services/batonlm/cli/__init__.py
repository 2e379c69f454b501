"""The commands for operators: up, down, chat, doctor, keys, batch, top, explain, replay, fetch."""
