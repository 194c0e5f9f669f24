"""Which tokens of a prompt stand for an image, a sound or a video, and what is written around them, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm_cli.pictures import Clip, Picture, Video


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """What stands for an image, or a sound. marker: what a chat template writes for it; before, token, after: what that becomes,
    `token` as often as there are rows of the tower's output. line_end: a token behind each line of these, the last one's being
    last_end. instead: of `token`, where a vocabulary lacks that; which it is changes nothing.
    Where images are cut into pieces, in front of the token of a piece is `piece`, with {row}, {column} or {number} from 1 on,
    behind each line of them pieces_end, and then `whole` and the token of all of it; in front of that of an image that is not
    cut, `alone`, and behind it alone_end, if that is not None, instead of `after`.
    whole_first: `whole`, the token of all of it and `after` are in front of the pieces, and pieces_end only between their lines.
    piece_end: behind the token of a piece; between: behind that, but for the last of a line. {number} in `before`: how many
    images there are before it.
    line: behind all that, where a template knows nothing of images; None: of such a template nothing is made.
    marks: the tokens of a mosaic whose squares lie apart, in the order of their kinds (see `Mosaic`); others have `token` there.
    shares_ends: where one image is right behind another, what is behind that is what is in front of this, and there once.
    often: a template may write so many markers for an image instead of one, as many as it has tokens (PP-Chart2Table).
    asked: control tokens that somebody's text may name all the same, which say what to do with an image, and which answers show.
    """

    marker: str
    token: str
    before: str = ""
    after: str = ""
    line_end: str = ""
    last_end: str = ""
    instead: str = ""
    piece: str = ""
    pieces_end: str = ""
    whole: str = ""
    alone: str = ""
    alone_end: str | None = None
    line: str | None = None
    whole_first: bool = False
    piece_end: str = ""
    between: str = ""
    marks: tuple[str, ...] = ()
    shares_ends: bool = False
    often: int = 1
    asked: tuple[str, ...] = ()

    def text(self, picture: Picture | Clip | Video, number: int = 0) -> str:
        """With one token for each of the picture's images, or of a clip's pieces, or of a video's, which has its own texts."""
        before = self.before.replace("{number}", str(number))
        if isinstance(picture, Video):
            return before + self.token.join(picture.texts) + self.after
        if isinstance(picture, Clip) or not picture.rows:
            after = self.after if self.alone_end is None else self.alone_end
            return before + self.alone + self.token * len(picture.images) + after
        columns, behind = range(1, picture.columns + 1), self.token + self.piece_end
        lines = [
            self.between.join(self.piece.format(row=i + 1, column=j, number=i * picture.columns + j) + behind for j in columns)
            for i in range(picture.rows)
        ]
        if self.whole_first:
            return before + self.whole + self.token + self.after + self.pieces_end.join(lines)
        return before + "".join(line + self.pieces_end for line in lines) + self.whole + self.token + self.after
