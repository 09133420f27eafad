"""How far a StatefulSet may shrink, and what a node drain must leave."""
