"""What people type who serve: up, down, chat, doctor, keys, batch, top, explain, replay, fetch."""
