"""One model computed by several processes: who has which rows, and how they come together."""
