"""What speculation did since the engine started, by position among the drafts of a step."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationCounts:
    """drafted, accepted: of each position, how many drafts were verified there, and how many were right."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """One request's drafts were verified."""
        for counts, count in ((self.drafted, num_drafts), (self.accepted, num_accepted)):
            counts += [0] * (num_drafts - len(counts))
            for position in range(count):
                counts[position] += 1
