"""How a rank starts, stops on a signal, is fenced and ends."""
