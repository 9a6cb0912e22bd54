"""What a server does with replies."""
