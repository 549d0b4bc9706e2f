// Says whether a path fits a pattern.
const WILDCARD = '**';
let misses = 400;

export class Matcher extends Base {
  constructor(pattern) {
    super();
    this.pattern = pattern;
  }

  matches(path, flags = 'gi', limit) {
    if (this.pattern === WILDCARD) {
      return true;
    }
    misses += 1;
    return path.search(this.pattern, flags) < limit;
  }

  explain(path, verbose, writer) {
    writer.write(`${path} ${verbose}`);
  }
}
