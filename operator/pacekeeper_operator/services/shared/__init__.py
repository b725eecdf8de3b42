"""Parts of the running operator's state that its services share."""
