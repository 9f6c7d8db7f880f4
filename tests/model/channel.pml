/*
 * The bounded-lag channel of csrc/channel/, as far as it concerns slots.
 * docs/design/model.md says which transition stands for which line of C++, what is left out, and
 * why that is sound.
 *
 *   RANKS    world size
 *   BOUND    k
 *   SLOTS    S, slots per ordered pair
 *   WORDS    1: a put waits until the receiver's credit word permits it; 0: it writes at once
 *   HEADERS  1: follows the credit in the header that one put relies on
 *   PULLS    1: follows the sender's memory of one slot, for messages larger than a slot
 *   WATCHED  with HEADERS or PULLS: the receiver of rank 0's messages that are followed
 *
 * A rank may at any time call what the interface allows. Once inside a call it stays there until
 * the call returns, so that a state without a step is a deadlock.
 */

#define PAIR(from, to) ((from) * RANKS + (to))
#define SLOT(from, to, sequence) (PAIR(from, to) * SLOTS + (sequence) % SLOTS)
/* Messages of `from` that have arrived at `to`; the peers are served in the order from + 1, ... */
#define SENT(from, to) \
  (posted[from] + (served[from] > ((to) + RANKS - (from) - 1) % RANKS -> 1 : 0))

byte posted[RANKS];
byte completed[RANKS];
byte released[RANKS];
byte served[RANKS]; /* peers that have the message of the post under way */

/* The inboxes. A stamp is a sequence number + 1, 0 before the first. */
byte payload[RANKS * RANKS * SLOTS];
byte arrival[RANKS * RANKS * SLOTS];

#if WORDS
byte credit_word[RANKS * RANKS]; /* [sender, receiver] */
#define HAS_CREDIT (posted[me] < credit_word[PAIR(me, peer)] + SLOTS)
#else
#define HAS_CREDIT true
#endif

/*
 * Credits in headers and memory for pulled messages never change what a rank does next, as long as
 * they are right. So the messages from rank 0 to WATCHED in slot 0 stand for all of them.
 */
#if HEADERS || PULLS
#define IS_WATCHED(from, to, sequence) ((from) == 0 && (to) == WATCHED && (sequence) % SLOTS == 0)
#endif

#if HEADERS
/* The header that the put of message n relies on is that of message n - k - 1 from the receiver. */
#define BRINGS_CREDIT(from, to, sequence) \
  ((from) == WATCHED && (to) == 0 && ((sequence) + BOUND + 1) % SLOTS == 0)
byte header_credit; /* messages released + 1; 0 once the header is read */
byte credit;        /* what rank 0 has read there; 0 once it is used */
#endif

#if PULLS
bool flag_pulled; /* of the message in the slot */
bool exposing;    /* the sender has memory for the slot; it may keep it past small messages */
byte exposed;     /* stamp in that memory */
bool pulling;     /* the receiver has mapped memory for the slot; it may keep it likewise */
bool mapped;      /* that mapping shows the sender's present memory */
#endif

/* Loop variables, 0 between steps. */
byte i;
byte oldest;

mtype = { idle, sending, blocked, delivering, awaiting, returning };
mtype = { in_slot, in_slot_keeping_memory, in_kept_memory, in_new_memory };

/*
 * All steps depend on differences of counters and on remainders by SLOTS. Once all counters have
 * come round the ring they start again: runs are endless, states are few. A stamp that becomes 0
 * is that of a message which nobody asks for again.
 */
inline begin_again() {
  oldest = 255;
  for (i : 0 .. RANKS - 1) {
    oldest = (released[i] < oldest -> released[i] : oldest);
  }
#if WORDS
  for (i : 0 .. RANKS * RANKS - 1) {
    oldest = (i / RANKS != i % RANKS && credit_word[i] < oldest -> credit_word[i] : oldest);
  }
#endif
#if HEADERS
  oldest = (credit != 0 && credit <= SLOTS -> 0 : oldest);
  oldest = (header_credit != 0 && header_credit <= SLOTS -> 0 : oldest);
#endif
  if
  :: oldest >= SLOTS ->
    printf("(from here on %d is taken off all sequence numbers)\n", SLOTS);
    for (i : 0 .. RANKS - 1) {
      posted[i] = posted[i] - SLOTS;
      completed[i] = completed[i] - SLOTS;
      released[i] = released[i] - SLOTS;
    }
    for (i : 0 .. RANKS * RANKS * SLOTS - 1) {
      payload[i] = (payload[i] > SLOTS -> payload[i] - SLOTS : 0);
      arrival[i] = (arrival[i] > SLOTS -> arrival[i] - SLOTS : 0);
    }
#if WORDS
    for (i : 0 .. RANKS * RANKS - 1) {
      credit_word[i] = (credit_word[i] > SLOTS -> credit_word[i] - SLOTS : 0);
    }
#endif
#if HEADERS
    credit = (credit > SLOTS -> credit - SLOTS : 0);
    header_credit = (header_credit > SLOTS -> header_credit - SLOTS : 0);
#endif
#if PULLS
    exposed = (exposed > SLOTS -> exposed - SLOTS : 0);
#endif
  :: else
  fi;
  i = 0;
  oldest = 0
}

/* What must hold when a message, in a slot or in memory of the sender, gives way to the next. */
inline check_free(stamp) {
  if
  :: stamp > released[peer] ->
    printf("rank %d overwrites message %d to rank %d, which is not released\n", me, stamp - 1,
           peer);
    assert(false)
  :: else
  fi
}

/* What must hold for a message when it is found, and still when it is released. */
inline check_readable(from, sequence) {
  assert(arrival[SLOT(from, me, sequence)] == sequence + 1);
  assert(payload[SLOT(from, me, sequence)] == sequence + 1);
#if PULLS
  if
  :: IS_WATCHED(from, me, sequence) && flag_pulled -> assert(mapped && exposed == sequence + 1)
  :: else
  fi
#endif
}

/* Everything of a message but its arrival word. */
inline write(place) {
  check_free(payload[SLOT(me, peer, posted[me])]);
  payload[SLOT(me, peer, posted[me])] = posted[me] + 1;
#if PULLS
  if
  :: IS_WATCHED(me, peer, posted[me]) && place == in_slot_keeping_memory -> flag_pulled = false
  :: IS_WATCHED(me, peer, posted[me]) && place != in_slot_keeping_memory ->
    check_free(exposed);
    flag_pulled = (place != in_slot);
    exposing = flag_pulled;
    exposed = (flag_pulled -> posted[me] + 1 : 0);
    mapped = mapped && place == in_kept_memory
  :: else
  fi;
#endif
#if HEADERS
  if
  :: IS_WATCHED(me, peer, posted[me]) ->
#if !WORDS
    if
    :: posted[me] >= SLOTS && posted[me] + 1 >= credit + SLOTS ->
      printf("rank %d would wait in post %d: it knows of %d messages released by rank %d\n", me,
             posted[me], (credit > 0 -> credit - 1 : 0), peer);
      assert(false)
    :: else
    fi;
#endif
    credit = 0
  :: BRINGS_CREDIT(me, peer, posted[me]) -> header_credit = released[me] + 1
  :: else
  fi;
#endif
  phase = delivering
}

/* A message that has arrived: what its header says, and its memory if it is not in the slot.
 * `keeping`: memory of an earlier one stays mapped. */
inline take(keeping) {
#if PULLS
  if
  :: IS_WATCHED(peer, me, completed[me]) && !(keeping) ->
    mapped = flag_pulled;
    pulling = flag_pulled
  :: else
  fi;
#endif
#if HEADERS
  if
  :: BRINGS_CREDIT(peer, me, completed[me]) ->
#if WORDS
    assert(header_credit <= credit_word[PAIR(me, peer)] + 1);
#endif
    credit = header_credit;
    header_credit = 0
  :: else
  fi;
#endif
  check_readable(peer, completed[me]);
  peer = (peer + RANKS - 1) % RANKS;
  if
  :: peer == me ->
    printf("rank %d completes %d\n", me, completed[me]);
    completed[me]++;
    phase = idle
  :: else
  fi
}

proctype Rank(byte me) {
  mtype phase = idle;
  byte peer = me; /* the one served, awaited or told; `me` between the calls */
  do
  :: d_step {
      phase == idle && posted[me] - released[me] <= BOUND ->
      for (i : 0 .. RANKS - 1) {
        assert(i == me || posted[me] <= SENT(i, me) + BOUND) /* the lag */
      }
      i = 0;
      phase = sending;
      peer = (me + 1) % RANKS
    }
  :: d_step {
      phase == sending && !HAS_CREDIT ->
      printf("rank %d waits in post %d: rank %d has not released %d\n", me, posted[me], peer,
             posted[me] - SLOTS);
      phase = blocked
    }
  :: d_step { (phase == sending || phase == blocked) && HAS_CREDIT -> write(in_slot) }
#if PULLS
  :: d_step {
      (phase == sending || phase == blocked) && HAS_CREDIT && IS_WATCHED(me, peer, posted[me]) &&
          exposing ->
      write(in_slot_keeping_memory)
    }
  :: d_step {
      (phase == sending || phase == blocked) && HAS_CREDIT && IS_WATCHED(me, peer, posted[me]) &&
          exposing ->
      write(in_kept_memory)
    }
  :: d_step {
      (phase == sending || phase == blocked) && HAS_CREDIT && IS_WATCHED(me, peer, posted[me]) ->
      write(in_new_memory)
    }
#endif
  :: d_step {
      phase == delivering ->
      printf("rank %d puts %d to %d\n", me, posted[me], peer);
      arrival[SLOT(me, peer, posted[me])] = posted[me] + 1;
      served[me]++;
      peer = (peer + 1) % RANKS;
      phase = sending;
      if
      :: peer == me -> served[me] = 0; posted[me]++; phase = idle
      :: else
      fi
    }
  :: d_step { phase == idle && completed[me] < posted[me] ->
      phase = awaiting;
      peer = (me + RANKS - 1) % RANKS
    }
  :: d_step {
      phase == awaiting && arrival[SLOT(peer, me, completed[me])] > completed[me] ->
      take(false)
    }
#if PULLS
  :: d_step {
      phase == awaiting && arrival[SLOT(peer, me, completed[me])] > completed[me] &&
          IS_WATCHED(peer, me, completed[me]) && pulling && !flag_pulled ->
      take(true)
    }
#endif
  :: d_step {
      phase == idle && released[me] < completed[me] ->
      printf("rank %d releases %d\n", me, released[me]);
      for (oldest : 0 .. RANKS - 1) {
        if
        :: oldest != me -> check_readable(oldest, released[me])
        :: else
        fi
      }
      released[me]++;
#if WORDS
      phase = returning;
      peer = (me + 1) % RANKS
    }
  :: d_step {
      phase == returning ->
      credit_word[PAIR(peer, me)] = released[me];
      peer = (peer + 1) % RANKS;
      phase = (peer == me -> idle : returning);
#endif
      begin_again()
    }
  od
}

init {
  atomic {
    for (i : 0 .. RANKS - 1) {
      run Rank(i)
    }
    i = 0
  }
}
