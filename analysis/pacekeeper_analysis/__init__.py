"""Pure analysis: numpy in, numbers out. Also the wire format between operator and trainer."""
