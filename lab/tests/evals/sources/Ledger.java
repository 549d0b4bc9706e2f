package bank;

import java.util.ArrayList;
import java.util.List;

/** Books payments between accounts. */
public class Ledger extends Journal {
    private static final int PAGE_SIZE = 128;
    private static final String CURRENCY = "GBP";
    private final List<Entry> entries = new ArrayList<>();

    public Ledger(String owner, int year, boolean sealed) {
        super(owner);
        this.year = year;
        this.sealed = sealed;
    }

    public Entry book(String from, String to, long pence) {
        if (sealed) {
            throw new IllegalStateException("the ledger is sealed");
        }
        Entry entry = new Entry(from, to, pence);
        entries.add(entry);
        return entry;
    }

    long balance(String account, int until, Rounding rounding) {
        long sum = 0;
        for (Entry entry : entries) {
            sum += entry.signed(account);
        }
        return rounding.apply(sum);
    }
}
