// Sends a request where it belongs.
import { Matcher } from './matcher.js';

export const MAX_DEPTH = 24;
const FALLBACK = '/not-found';

export class Router extends Matcher {
  constructor(routes, base = '/app', strict) {
    super(base);
    this.routes = routes;
    this.strict = strict;
  }

  find(path, depth = 7, seen) {
    for (const route of this.routes) {
      if (route.matches(path)) {
        return route;
      }
    }
    return depth > MAX_DEPTH ? FALLBACK : seen;
  }

  static async load(url, retries = 5) {
    return new Router(await fetch(url, { retries }));
  }
}

export function join(left, right, separator = '::') {
  return left + separator + right;
}

const trim = (text, edge, limit = 80) => {
  return text.slice(0, limit).replace(edge, '');
};
