// Code divided into comments, strings, numbers, keywords and the rest. Each pattern takes what it began, also without an end, so
// that the time is linear in the code.

const LONGEST = 200000; // characters of a block that is still highlighted
const KEYWORDS = new Set(
  `abstract and as assert async await begin bool boolean break byte case catch char class const continue debugger def default
  defer del delete do done double echo elif else elseif end enum esac except export extends extern false fi final finally float
  fn for foreach from func function global go goto if impl implements import in include inline instanceof int interface is lambda
  let long loop match mod module mut namespace new nil none nonlocal not null of operator or override package pass private
  protected pub public raise readonly require return self short signed sizeof static str string struct super switch template
  then this throw throws trait true try type typedef typeof undefined union unless unsafe unsigned until use using var virtual
  void volatile where while with yield select insert update values into create table drop alter join left right inner outer on
  group order by having limit primary key`.split(/\s+/),
);
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const HASH = String.raw`#[^\n]*`;
const DASHES = String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const MARKUP = String.raw`<!--[^]*?(?:-->|$)`;
const COMMENTS = {
  [SLASHES]:
    "javascript js jsx typescript ts tsx java c h cpp c++ hpp cs csharp go rust rs swift kotlin kt scala php dart json jsonc css scss less zig",
  [HASH]:
    "python py bash sh shell zsh console yaml yml toml ruby rb perl r make makefile dockerfile ini elixir julia nix powershell",
  [DASHES]: "sql lua haskell hs ada",
  [MARKUP]: "html xml svg vue markdown md",
};
const STRING =
  String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|` +
  "`(?:[^`\\\\]|\\\\[^])*`?";
const PATTERNS = new Map();
for (const [comment, names] of Object.entries(COMMENTS)) {
  const string = comment === MARKUP ? String.raw`"[^"<>]*"` : STRING;
  const word = comment === MARKUP ? String.raw`<\/?[\w:-]+|\/?>` : String.raw`[A-Za-z_$][\w$]*`;
  for (const name of names.split(" ")) PATTERNS.set(name, `(${comment})|(${string})|(\\b\\d[\\w.]*)|(${word})`);
}

// The parts of code, in their order: {from, to, kind}; `kind` is a class, or "".
export function* highlight(code, language) {
  const pattern = code.length <= LONGEST && PATTERNS.get(language);
  let end = 0;
  for (const found of pattern ? code.matchAll(new RegExp(pattern, "g")) : []) {
    const [text, comment, string, number, word] = found;
    const keyword = word && (/[<>]/.test(word) || KEYWORDS.has(/^[A-Z]+$/.test(word) ? word.toLowerCase() : word));
    const kind = comment
      ? "comment"
      : string
        ? "string"
        : number
          ? "number"
          : keyword || /^(None|True|False)$/.test(word)
            ? "keyword"
            : "";
    if (!kind) continue;
    if (end < found.index) yield { from: end, to: found.index, kind: "" };
    end = found.index + text.length;
    yield { from: found.index, to: end, kind };
  }
  if (end < code.length) yield { from: end, to: code.length, kind: "" };
}
