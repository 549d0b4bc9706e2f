// A page that was opened from a folder may start no worker. There, the script of the search runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      // As between a page and its worker, each gets a copy of what the other says, after the one that speaks has ended.
      const tell = (to, said) => {
        const data = structuredClone(said);
        setTimeout(() => to.onmessage && to.onmessage(new MessageEvent("message", { data })));
      };
      this.loaded = new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.onload = resolve;
        script.onerror = reject;
        inside.document.head.append(script);
      });
      this.loaded.catch((event) => this.onerror && this.onerror(event));
      inside.postMessage = (said) => tell(this, said);
      this.postMessage = (said) => this.loaded.then(() => tell(inside, said), () => {});
    }
    terminate() {
      this.frame.remove();
    }
  };
