package bank;

/** Reads a ledger, and says what is wrong in it. */
public final class Auditor extends Reader implements Visitor {
    static final long TOLERANCE = 25L;
    private static final double RATIO = 0.75;
    private int found;

    public void visit(Entry entry, Context context, Report report) {
        if (entry.pence() < 0) {
            report.add(entry);
            found++;
        }
    }

    @Override
    public int count() {
        return found;
    }

    protected boolean suspect(Entry first, Entry second, long withinDays) {
        return first.equals(second) && withinDays < 3;
    }
}
