"""The command line: baton up, down, chat, doctor, bench."""
