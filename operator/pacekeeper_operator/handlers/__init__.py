"""kopf's registrations: thin."""
