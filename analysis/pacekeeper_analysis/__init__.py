"""Pure analysis: numpy in, numbers out. Also the words that operator and trainer speak with each other."""
